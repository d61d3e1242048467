"""Talk MQTT, admit requests, watch and restart the worker. Never touches the accelerator."""
