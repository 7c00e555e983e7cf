"""`python -m extproc`: the same as the command `extproc`."""

from extproc.commands.main import main

if __name__ == "__main__":
    main()
