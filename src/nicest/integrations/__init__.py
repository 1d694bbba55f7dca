"""Scoring, imputing, predicting and sampling on many machines, by engines that share out the work."""
