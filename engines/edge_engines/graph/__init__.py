"""Write the ONNX graph of a model in the lowering of the target."""
