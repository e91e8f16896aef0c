"""What is asked (`Problem`), how it runs (`VariantSpec`), what is legal, rendered and compiled."""
