"""`python -m assay` is the same as the `assay` command."""

from assay.cli.app import main

if __name__ == "__main__":
    main()
