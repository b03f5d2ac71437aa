"""Labels of many scans by a trained network: checkpoints, sources of scans, files of predictions, and the Labeller."""

from pumice.label.labeller import Labelled, Labeller

__all__ = ["Labelled", "Labeller"]
