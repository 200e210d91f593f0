"""`python -m tam` is the command `tam`."""

from tam.cli import main

main()
