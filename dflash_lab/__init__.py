"""DFlash Lab: train, measure and understand DFlash drafters. Importing this package stays cheap: no torch."""

import os

__version__ = "0.1.0"

# Threads that wait for each other sleep after microseconds instead of spinning on: as fast on an idle
# machine, many times as fast where another program takes the core that the awaited thread needs. torch's
# OpenMP library reads this once, when it is loaded: hence here, before anything imports torch. A person's
# own value wins.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
