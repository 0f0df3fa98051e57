"""What runs on the device: Triton functions, each with its PyTorch reference."""
