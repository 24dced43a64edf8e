"""Keys, signatures, and the signed forms that other tools read: DSSE, COSE, C2SP notes, model signatures; pure."""
