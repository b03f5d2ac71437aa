"""Other libraries' names over pumice: code and checkpoints written for them run unchanged.

`install("spconv")` makes `import spconv.pytorch` find pumice.compat.spconv; `python -m pumice.compat run train.py`
does so, for all of LIBRARIES, around one program.
"""

from pumice.compat.install import LIBRARIES, install, uninstall

__all__ = ["LIBRARIES", "install", "uninstall"]
