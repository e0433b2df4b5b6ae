"""Distillation: a student learns from a teacher, or from the logits that one left."""
