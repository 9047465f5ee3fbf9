"""A canceller as a static web page: the exported model, the linear stage in JavaScript, onnxruntime-web, a pair of
sounds to try. Any static file server serves it; nothing leaves the browser."""
