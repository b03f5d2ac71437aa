"""Complete networks."""

from pumice.models.centerpoint import CenterPointBackbone
from pumice.models.minkunet import MinkUNet

__all__ = ["CenterPointBackbone", "MinkUNet"]
