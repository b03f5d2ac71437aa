"""Complete networks."""

from pumice.models.centerpoint import CenterPointBackbone
from pumice.models.minkunet import MinkUNet
from pumice.models.rgcn import RGCN

__all__ = ["RGCN", "CenterPointBackbone", "MinkUNet"]
