"""`python -m mocokit` and the `mocokit` command."""

from mocokit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
