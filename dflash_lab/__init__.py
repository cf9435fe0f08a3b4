"""DFlash Lab: train, measure and understand DFlash drafters. Importing this package stays cheap: no torch."""

__version__ = "0.1.0"
