"""What was measured on named hardware, and the pre-tuned winners that ship."""
