"""What of a model matters most: gradient activity, curvature of the loss and locality of access, as one score."""

from tierload.heat.lanczos import Radius
from tierload.heat.meter import HeatMeter
from tierload.heat.ranking import Heat

__all__ = ["Heat", "HeatMeter", "Radius"]
