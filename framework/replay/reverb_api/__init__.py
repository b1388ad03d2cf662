"""Reverb's interface: writers of single steps, on top of the batch writer."""
