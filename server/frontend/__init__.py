"""The HTTP process: sockets, connections and the web server. Knows no tensor."""
