"""Checkpoints: written when Lightning or the user asks and when a run cannot continue, read when a fit resumes."""
