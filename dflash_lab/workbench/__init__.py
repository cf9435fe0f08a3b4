"""How people use it: stages, run folders, figures, widgets, the command line. No torch at import."""
