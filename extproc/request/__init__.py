"""What does this request want, and what is said back? Messages of ext_proc in and out, one stream's
state machine, readers of bodies, errors in OpenAI's words, `model` put back into responses.

Begin with `stream`; `processor` is the service around it. Only what composes the service, and the
laboratory, import this room.
"""
