"""Masks and their plans, the store of winners, dispatch and the torch operators."""
