(() => {
  const told = document.getElementById("live");
  const parts = document.querySelectorAll("header[id], section[id]");
  const connect = () => {
    const source = new EventSource("page/live");
    source.onopen = () => { told.textContent = "live"; };
    source.onerror = () => {
      told.textContent = "no answer, trying again";
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
    };
    for (const part of parts) source.addEventListener(part.id, (event) => {
      part.innerHTML = event.data;
      if (part.id === "state") document.title = `kvstow: ${part.querySelector(".pill").textContent}`;
    });
  };
  connect();
})();
