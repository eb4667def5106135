"""Tests of the experts: remapping, merge rules, manifest and store."""
