"""What a slot may hold between a private tensor and a plain average: better shared tensors, and residuals to them."""
