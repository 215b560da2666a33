// Runs before the first paint, so that a chosen theme does not flash. A classic script on purpose.
"use strict";
try {
  const theme = localStorage.getItem("tellin.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is off: the system's theme is used.
}
