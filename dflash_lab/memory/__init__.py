"""What fits: account, fake-tensor count, measurement, fit, advice."""
