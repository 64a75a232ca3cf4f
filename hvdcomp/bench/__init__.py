"""Measurements: what methods cost and save on this machine."""
