"""The tables of the desktop app. Version N of the database is what the first N migrations make."""

from __future__ import annotations

_FIRST = """
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    folder TEXT NOT NULL DEFAULT '',
    system_prompt TEXT NOT NULL DEFAULT '',
    sampling TEXT NOT NULL DEFAULT '{}',
    head INTEGER REFERENCES message (id) ON DELETE SET NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    deleted REAL
);
CREATE INDEX conversation_by_time ON conversation (updated DESC);

-- a tree: an edited message, and another answer to the same question, is a sibling of the first
CREATE TABLE message (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
    parent INTEGER REFERENCES message (id) ON DELETE CASCADE,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    content TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('complete', 'streaming', 'stopped', 'failed')),
    details TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL
);
CREATE INDEX message_by_conversation ON message (conversation, parent);
CREATE INDEX message_by_parent ON message (parent);

CREATE TABLE attachment (
    id INTEGER PRIMARY KEY,
    message INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX attachment_by_message ON attachment (message);

CREATE TABLE fidelity_run (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL,
    created REAL NOT NULL,
    result TEXT NOT NULL
);
CREATE INDEX fidelity_by_model ON fidelity_run (model, created DESC);

CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL);

-- answers are indexed when they have come to their end
CREATE VIRTUAL TABLE message_text USING fts5 (content, content = 'message', content_rowid = 'id', tokenize = 'trigram');
CREATE TRIGGER message_inserted AFTER INSERT ON message WHEN new.state <> 'streaming' BEGIN
    INSERT INTO message_text (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER message_deleted AFTER DELETE ON message WHEN old.state <> 'streaming' BEGIN
    INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER message_finished AFTER UPDATE OF state ON message
WHEN old.state = 'streaming' AND new.state <> 'streaming' BEGIN
    INSERT INTO message_text (rowid, content) VALUES (new.id, new.content);
END;
"""

MIGRATIONS: tuple[str, ...] = (_FIRST,)
