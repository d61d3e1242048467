"""Build an engine from any ONNX model, with INT8 chosen by what it does to the model's own outputs.

build.py is the table of contents: read (source, samples) -> plain graph -> ranges -> local errors and effects of each
unit -> choice under the gate -> Q/DQ graph -> lint -> verify in a child process -> compile -> manifest.
"""
