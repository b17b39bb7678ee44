"""`python -m tokencustody`."""

from tokencustody.cli import main

if __name__ == "__main__":
    main()
