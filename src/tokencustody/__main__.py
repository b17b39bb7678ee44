"""Where the command line starts: `python -m tokencustody`, and the script `tokencustody`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C is exit code 130: at once, unless the command has something to end in order."""
    # No KeyboardInterrupt: most of a short command's time goes into loading modules, and a C extension that is being
    # loaded turns it into another error, or crashes.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(130))
    try:
        from tokencustody.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
