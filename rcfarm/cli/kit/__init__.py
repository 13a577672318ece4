"""How any async function becomes a command: options, connection, output, errors, completion."""
