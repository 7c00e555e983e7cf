"""`python -m extproc`: the same as the command `extproc`."""

from extproc.cli import main

if __name__ == "__main__":
    main()
