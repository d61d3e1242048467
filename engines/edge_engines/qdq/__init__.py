"""Hold what makes an ONNX graph with Q/DQ one that TensorRT and ONNX Runtime run in INT8.

lint.py checks a written file; codes.py makes codes and scales that pass; constants.py reads weights one at a time.
"""
