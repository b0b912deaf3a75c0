"""Generating answers with a model: decoding, and the teacher's responses as training data."""
