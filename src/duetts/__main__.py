"""`python -m duetts` is the `duetts` command."""

from duetts.cli import main

main()
