"""Wrapped apps: run on scenarios, trained, evaluated, and served with the trained model."""
