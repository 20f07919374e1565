"""`python -m peraxis`, the same as the command `peraxis`."""

from peraxis.cli import main

if __name__ == "__main__":
    main()
