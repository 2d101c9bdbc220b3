"""Images: inspecting, decoding and augmenting them."""
