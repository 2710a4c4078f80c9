"""Policies: functions from a site to a decision, made to be combined."""
