"""Figures and widgets, one file a stage."""
