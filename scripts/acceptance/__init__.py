"""The stages of scripts/gpu_acceptance.py."""
