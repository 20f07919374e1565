"""Parts of an HTTP process that know no route: sockets, connections, and the link to the engine."""
