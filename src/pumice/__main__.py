"""`python -m pumice` is the command line `pumice`; launchers such as `torchrun -m pumice` take modules."""

from pumice.cli import start

if __name__ == "__main__":
    start()
