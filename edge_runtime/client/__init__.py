"""Ask a device over MQTT, from Python.

    from edge_runtime.client import Client, Options

    with Client(host="127.0.0.1", device="local") as client:
        print(client.ask("Name three uses of a heat sink.").text)
        for piece in client.stream("Invent a name for a robot.", options=Options(temperature=0.8, seed=7)):
            print(piece, end="", flush=True)

One request has one id, however often it has to be sent; frames are put in order by their number; what was open is sent
again after a reconnect or a restart of the device. Thread safe: several requests may be open at once.
"""

from edge_runtime.client.answer import Answer
from edge_runtime.client.answer_stream import AnswerStream
from edge_runtime.client.client import Client
from edge_runtime.client.question import Options, Prompt

__all__ = ["Answer", "AnswerStream", "Client", "Options", "Prompt"]
