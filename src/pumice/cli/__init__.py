"""The command line `pumice` and its report. Nothing else imports this package."""

import sys


def start() -> None:
    """Run the command line, or name the package to install if one is missing."""
    try:
        from pumice.cli.main import main
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pumice"):
            raise
        sys.exit(f"error: the command line needs {error.name}: run `pip install .[cli]` in a clone of pumice")
    main()
