"""Where the command line starts: `python -m tokencustody`, and the script `tokencustody`."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        # Here, for loading the commands takes a while, and Ctrl-C may come then.
        from tokencustody.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
