"""Hangs, as a part of a dry session: with a child in a session of its own, which must end with it, too."""

import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "child.pid").write_text(str(child.pid))
    print("hangs now", flush=True)
    time.sleep(600)
