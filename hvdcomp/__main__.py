"""`python -m hvdcomp` is the command `hvdcomp`."""

from hvdcomp.cli import main

if __name__ == "__main__":
    main()
