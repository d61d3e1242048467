"""Turn a graph into what the target loads.

tensorrt.py is the front. The compiler process is child.py, which alone imports TensorRT: module.py chooses which,
engine.py builds, inspector.py reloads. process.py runs it and frames.py is what both sides say.
"""
