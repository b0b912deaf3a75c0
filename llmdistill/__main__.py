"""`python -m llmdistill` is the command `llmdistill`."""

from llmdistill.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
